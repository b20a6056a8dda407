"""What is to be done: what is pending in the windows of a source, and which runs to request."""
