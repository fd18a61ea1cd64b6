"""SGLang: HiCache keeps its third tier in a cluster, and prefill hands KV over to decode (``pd``)."""
