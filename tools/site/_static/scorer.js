// Orders the results of the search: what explains comes before scripts, and the index
// of symptoms before all that only mentions a message. Sphinx reads this file.
var Scorer = {
  score: (result) => {
    const [page, , anchor, , score, file] = result;
    const query = new URLSearchParams(location.search).get("q");
    if (page === "docs/symptoms") {
      if (!anchor) result[2] = `#find=${encodeURIComponent(query)}`; // see symptoms.js
      return score + 8;
    }
    // For English words the English pages, which come first in the other's list, too.
    if (page.endsWith(".zh-CN") && !/\p{Script=Han}/u.test(query)) return score / 2;
    return /\.(md|ipynb)$/.test(file) ? score : score / 10;
  },
  // What follows is as in Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
