"""What is compared; one module per system, each with a `SYSTEMS` table of its variants."""
