"""What engines tell routers: that they are there, which kind they are, and how busy."""
