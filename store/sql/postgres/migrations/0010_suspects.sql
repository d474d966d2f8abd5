-- Limits for suspects of a runner's death, and the requested length of each lease: one that ends
-- later than this from now was granted before the clock was set back.

alter table rollouts add column together bigint;  -- its runner may hold so many; null: any number
alter table attempts add column together bigint;  -- its silent runner held so many; null: not silent
alter table attempts add column lease double precision not null default 3600;  -- seconds

create index rollouts_suspect on rollouts (state)
where together is not null and state in ('queued', 'running');
