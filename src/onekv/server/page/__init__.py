"""The page at /: a view of /admin/live, and a chat; static files of this package.

    files.py   which file is sent for which path, with which headers
    static/    index.html, style.css, and ES modules: main.js starts the others
        link.js      requests with the key; the feed, with reconnects
        memory.js    the memory line
        map.js       the blocks of a pool
        panels.js    requests, tiers, models
        prefix.js    what was reused and what was not, and why
        tree.js      cached conversations
        fetched.js   data that depends on the key and is therefore not in the feed
        chat.js      the view of a conversation; talk.js: its tree, and generating an answer
        vendor/      third-party libraries, unchanged, with versions, licences and hashes

There is no build step. The browser loads nothing from other hosts, which the Content-Security-Policy enforces. Output
of models and users is shown as text.
"""
