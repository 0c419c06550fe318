"""The tests, laid out as the package is; helpers stand beside the tests that use them."""
