"""Users that hold conversations, with Locust: `make load-test`. Locust's processes import it as `load_tests.locust`.

No folder above this one may lie in `sys.path`, else this room hides the package `locust`; the repository's root may.
"""
