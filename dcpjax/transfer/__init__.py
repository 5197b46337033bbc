"""KV transfers between engines that shard their caches each in their own way.

Plan (which rank sends what to which), bind (to pages and addresses), execute (a backend).
"""
