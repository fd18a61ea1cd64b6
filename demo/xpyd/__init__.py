"""The xPyD demo: a router before any number of prefill and decode instances of the demo's engine.

``scheduler`` runs many requests at once on one engine, ``server`` puts an OpenAI-compatible endpoint before it, and
``__main__`` starts instances and the router, and shows what happens while instances come and go.
"""
