"""Shipped fakes and contract checks: for p2pkv's own tests, and for anyone who adds an implementation."""
