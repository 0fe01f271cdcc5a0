"""Filling a bucket before the first user asks: the prewarm job.

`manifest`, `media` and `buckets` say what to encode and bring it here, `target` what is there
already, `runner` does the rest by a batch at a time; `encoding` is the seam to vLLM, `expect`
compares with a server. `job` puts a job together, `ray` runs many on a cluster.
"""
