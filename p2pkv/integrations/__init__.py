"""Where serving engines plug p2pkv in. Each module works with the engine installed or not."""
