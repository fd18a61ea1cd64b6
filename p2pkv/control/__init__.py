"""The control plane: its sockets, what is said over them, and who may."""
