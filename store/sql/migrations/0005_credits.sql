-- Credit of the calls that a step trained, and groups that a step discarded.

create table credits (
    transition integer not null references transitions (seq),
    policy text not null,
    step integer not null,
    advantage blob not null,            -- float32: one number for each token, or one for all
    baseline blob not null,             -- of each comparison after the other
    gate blob not null,
    weight blob not null,
    psi blob not null,
    primary key (transition, policy)
) strict, without rowid;

alter table runs add column groups_discarded integer not null default 0;
