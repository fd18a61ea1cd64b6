"""A transfer backend of SGLang: prefill offers what decode granted room for, and decode pulls."""
