"""The indexer API of Mooncake's RFC 1403: which node has how much of a prompt, answered from the directory."""
