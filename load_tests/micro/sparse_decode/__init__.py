"""What decoding gains where a prefix is kept sparse. `python -m load_tests.micro.sparse_decode`."""
