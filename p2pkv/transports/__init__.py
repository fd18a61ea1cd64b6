"""The transports p2pkv knows, and the choice between them."""
