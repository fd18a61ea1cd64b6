"""Real nodes, or whole hosts, in network namespaces: a seeded schedule of faults, every byte and deadline judged.

``make test-chaos SECONDS=300 SEED=7``, with ``FLEET=hosts`` of hosts; docs/testing.md, Chaos.

    __main__       the run: builds the rest
    driver         plays the schedule, stops at the first broken promise
    host_driver    bumps, changes of the secret and drains, of hosts
    schedule       what befalls whom and when, drawn from the seed
    host_schedule  the same of hosts
    faults         how each kind of fault is done, and undone
    namespaces     the network: one bridge, cuts, resets, slow links
    processes      what all fleets are to the driver
    fleet          whole nodes
    hosts          hosts: a node, its keeper and attached engines on each; etcd at a place of its own
    etcd           that etcd
    worker         one process: its clock, its metronome, the driver's commands
    host_worker    what the processes of a host are
    load           what a node's engine does: pages
    engine_load    the same of an attached engine
    exchange       what a node's engine does: transfers
    threads        the threads that do so
    contents       bytes that say which page and version they are
    journal        what the workers tell the driver, in files that outlive them
    stopwatch      how long a call took, and waited for a processor
    oracle         which promises were broken
    recovery       how soon everything is found again, and back at its level
    report         progress, summary, and what is left of a failure
"""
