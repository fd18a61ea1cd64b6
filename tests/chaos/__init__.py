"""Real nodes in network namespaces under a seeded schedule of faults, every byte and every deadline judged.

``make test-chaos SECONDS=300 SEED=7``; docs/testing.md, Chaos.

    __main__    the run: builds the rest, plays the schedule, stops at the first broken promise
    schedule    what befalls whom and when, drawn from the seed
    faults      how each kind of fault is done, and undone
    namespaces  the network: one bridge, cuts, resets, slow links
    fleet       the node processes as the driver sees them
    worker      one node process: its clock, its metronome, the driver's commands
    load        what a node's engine does: pages
    exchange    what a node's engine does: transfers
    contents    bytes that say which page and version they are
    journal     what the workers tell the driver, in files that outlive them
    oracle      which promises were broken
    recovery    how soon everything is found again, and back at its level
    report      progress, summary, and what is left of a failure
"""
