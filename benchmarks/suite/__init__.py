"""Shared parts of the benchmarks; run in the benchmarks' own processes, never imported by ec_s3."""
