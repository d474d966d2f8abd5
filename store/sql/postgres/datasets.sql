-- name: lock_datasets
-- Keeps the state of versions and the set of unused sides unchanged until the commit.
select pg_advisory_xact_lock(hashtextextended('agentrl data sets', 0));
