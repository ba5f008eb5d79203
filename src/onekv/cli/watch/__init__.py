"""What `onekv top` shows: a server's live snapshots (GET /admin/live) in a terminal.

    figures   turns a snapshot into the text, bars and rows that are shown; independent of the terminal
    feed      a thread that reads snapshots, and reconnects when the connection is lost
    app       the screen: layout and key bindings (textual, extra `top`)

The feed's thread posts messages; everything else happens in the app's event loop. A snapshot is complete, so only the
newest is kept, plus one set of figures per second for the sparklines.
"""
