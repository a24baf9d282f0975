// Orders the results of the search: what explains comes before scripts, and the index
// of symptoms before all that only mentions a message. Sphinx reads this file.

// A page is found if it has all of the words. A message rarely has: the filter of the
// symptoms is for that, and takes it as it is.
addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q");
  const results = document.getElementById("search-results");
  if (!query || !results) return;
  const isChinese = /\p{Script=Han}/u.test(query);
  const link = document.createElement("a");
  link.href = `docs/symptoms${isChinese ? ".zh-CN" : ""}.html`;
  link.hash = `find=${encodeURIComponent(query)}`;
  link.textContent = isChinese
    ? "是报错或日志？在“报错与现象速查”中查找"
    : "A message or a log? Look for it in the symptoms";
  const offer = document.createElement("p");
  offer.append(link);
  results.before(offer);
});

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
