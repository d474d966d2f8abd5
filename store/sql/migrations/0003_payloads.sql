-- A prune checks for each payload that it leaves behind whether a call still refers to it.

create index transitions_by_tools on transitions (tools) where tools is not null;
