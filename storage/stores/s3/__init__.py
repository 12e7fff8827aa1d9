"""The store over an S3 bucket.

`store` implements the contract and writes objects, in one request or in parts; `read` reads them,
in parallel if they are large. `address` parses the URL, by which `kind` opens the store. Only
`client` imports boto3. `errors` decides whether and when a failed request is retried, `advice` what
to do about it.
"""
