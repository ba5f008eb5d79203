"""What `onekv top` shows: a server's live snapshots (GET /admin/live) in a terminal.

    figures   from a snapshot to the text, bars and rows that are shown; knows no terminal
    feed      a thread that reads snapshots, and connects again when the server has gone away
    app       the screen: where the figures stand, and what keys do (textual, extra `top`)

The feed's thread posts messages; everything else happens in the app's event loop. A snapshot is complete, so the newest
is all that is kept, and a second's figures for the lines.
"""
