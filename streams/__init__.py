if __name__ == "streams":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.streams", name="streams")
