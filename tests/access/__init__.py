"""Who may write what: deploy/access/ over a real broker and a real S3 server."""
