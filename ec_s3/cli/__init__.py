"""The `ec-s3` command, and the generator of the reference pages."""
