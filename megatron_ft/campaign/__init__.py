"""Campaigns: jobs that are really run, struck by faults, and held to their fault-free run.

A campaign is a YAML file (`spec`, `reading`). Its cases become command lines (`job`), are launched
one after another (`launching`, `runner`), read back (`recorded`), judged (`checks`) and shown
(`results`). Production code knows nothing of it. See docs/campaigns.md.
"""
