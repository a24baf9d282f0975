// In place of the theme's, which is 1.6 MB on each page: site.css has the few icons.
