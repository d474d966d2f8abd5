"""Audits: attacks on a run's verifier, as a policy would make them, before a policy does.

`attacks` has the answers, `scoring` the verifier out of reach of networks, `examine` the course of
an audit, `report` its result, and `subjects` what is audited: a run file, or an environment.
"""
