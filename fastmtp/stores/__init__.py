"""Where published things lie: a bucket of any S3-compatible store, or a directory; one interface for both."""
