"""The fault rig: real producers, dispatchers and operators under faults, and a check of what they remember.

    python3 dev.py chaos --minutes 5 --seed 7

Read `journal` (what is remembered, outside the database), `transitions.sql` (what the database remembers), `app` (the
jobs), `producer`, `operators`, `receiver` and `proxy` (who takes part), `faults` (what is done to them), `rig` (who
starts and ends it all), then `evidence` and `checker` (the verdict, a pure function of what was remembered).
"""
