-- Whether anything still refers to a payload is asked for each one that a prune leaves behind.

create index transitions_by_tools on transitions (tools) where tools is not null;
