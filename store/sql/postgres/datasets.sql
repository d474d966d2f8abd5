-- name: lock_datasets
-- Whether a version is complete, and which sides no item names, stays true until the commit.
select pg_advisory_xact_lock(hashtextextended('agentrl data sets', 0));
