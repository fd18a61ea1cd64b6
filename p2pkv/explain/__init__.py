"""Where a page is, and why it is not there: asked of every member, which says what it has and remembers.

The names here are public: what :meth:`p2pkv.Node.explain` returns is made of them.
"""

from p2pkv.explain.events import PageEvent
from p2pkv.explain.explanation import Explanation, Happening, Place, Verdict
from p2pkv.explain.namespaces import Difference

__all__ = ["Difference", "Explanation", "Happening", "PageEvent", "Place", "Verdict"]
