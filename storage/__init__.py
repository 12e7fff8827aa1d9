if __name__ == "storage":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.storage", name="storage")
