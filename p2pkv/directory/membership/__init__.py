"""Membership: who is in the cluster. One interface (:mod:`.base`), an engine for each way of finding out."""
