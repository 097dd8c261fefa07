"""The replay service without sockets: log, priority index, limiter and table. numpy only, one owner, no clock."""
