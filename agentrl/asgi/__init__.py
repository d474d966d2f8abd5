"""HTTP servers of ASGI applications, for the parts that are one."""
