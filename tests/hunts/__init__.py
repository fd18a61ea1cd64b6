"""Hunts: seeded schedules of work and faults, each judged by an oracle.

A hunt is a module here that ends with ``HUNT``. ``make test`` runs each for a few seconds with fixed seeds,
``make test-hunts SECONDS=600`` runs them for as long as one wants, ``HUNT=name SEED=n`` replays one schedule.
docs/testing.md says what each hunts for, and which planted bugs it has to find.
"""
