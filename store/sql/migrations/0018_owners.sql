-- Who holds a run, and until when: a second start is refused while its owner lives.

alter table runs add column owner text not null default '';  -- as it describes itself; '': nobody
alter table runs add column owned_until real not null default 0;
