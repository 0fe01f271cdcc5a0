"""What tests of `ec_s3`, and of software that embeds it, are built from; no part of serving.

`memory` is a store in memory, `conformance` the promises of the store protocol as a test class,
`moto` an embedded S3 server, `servers` real ones in processes of their own, `faults` a proxy that
makes any S3 server misbehave on purpose.
Importing this package loads none of them.
"""
