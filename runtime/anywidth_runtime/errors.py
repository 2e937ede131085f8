"""The two errors of the runtime."""


class BundleError(ValueError):
    """A file that cannot be used: damaged, hostile, or of another format."""


class RequestError(ValueError):
    """A call that cannot be answered: a width the file lacks, or inputs of another shape."""
