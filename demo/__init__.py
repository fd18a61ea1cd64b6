"""The demo: two prefill nodes and a decode node serve a prompt, and share its KV pages through p2pkv.

``model`` is a small transformer, ``paged_kv`` its paged KV cache, ``engine`` serves prompts with both and a
p2pkv node. ``worker`` runs one engine as a process; ``cluster`` starts the three of them and ``__main__``
tells them what to do.
"""
