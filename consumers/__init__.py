if __name__ == "consumers":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.consumers", name="consumers")
