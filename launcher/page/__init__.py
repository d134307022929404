"""`sluice page`: the folder of a run, or of many runs, as a page that follows them live.

::

    browser ◄── static/ (page.html, page.css, page.js, views.js, charts.js, lanes.js, samples.js)
       │  ▲
       │  └── server-sent events: what has changed, twice a second ◄── views.py: sizes of the run's files
       ▼
    server.py: access, which run ──► views.py, samples.py: data ◄── ledger, metrics, spans, evaluations, logs

`sluice report` (report.py) writes static/ and the data as one file, without a server.

The page's process only reads, and no part of a run waits for it. A run that has ended, was killed, or was copied from another
machine looks the same. Every text of a run goes to the browser as JSON, and into the page as text.
"""
