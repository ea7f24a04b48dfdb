"""Small programs that measure: `python -m benchmarks NAME`. Each ends with one JSON document as its last line."""
