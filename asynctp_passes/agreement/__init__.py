"""Agree with the other ranks: deviations from the program's collectives are done by all ranks of a group, or by none.

    rank 0: deviations ─▶ store ◀─ deviations :rank 1          accepted if every rank has it, refused otherwise

Each rank puts the deviations of a graph (`deviations`) into the group's own key-value store, under the function that is
compiled and a hash of the group's collectives in the graph. It waits until every rank has the same one. It waits no
longer than until every rank has compiled this function, or for `ASYNCTP_AGREE_S` seconds. The outcome is one record for
each deviation of a function. The first rank to know it writes the record, and all ranks obey it from then on. A graph
without deviations waits for nobody. docs/explanation/agreement-of-ranks.md says why.

It edits no graph, and proves nothing: it knows deviations by their texts.
"""
