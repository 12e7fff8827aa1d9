"""The store over an S3 bucket.

`store` implements the contract, `address` parses its URL. `read` and `write` transfer objects in
one request or in parallel parts. Only `client` imports boto3. `errors` decides whether and when a
failed request is retried, and what to advise.
"""
