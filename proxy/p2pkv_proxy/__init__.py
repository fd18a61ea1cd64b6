"""The xPyD router: what stands in front of any number of prefill and decode instances of SGLang or vLLM.

A request comes in over HTTP (``app``), is read within bounds (``bodies``, ``guarded_http``) and understood as far as
routing needs it (``prompts``). ``routing`` picks a prefill and a decode among what is there (``registry``, fed by
``discovery``, ``listing`` and ``probing``) with one of ``policies``; ``protocols`` know how to hand it to such a pair;
``serving`` sees it through: deadlines, a client that leaves, and another pair where one fails before the first token.

Three promises: every request ends by its deadline; no request fails because of one instance as long as none of its
tokens has reached the client; and nothing is forwarded that is known to crash an engine.
"""
