"""Landing and lake in an object store."""
