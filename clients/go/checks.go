package tmc

import (
	"context"
	"crypto/subtle"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	tmcv1 "tmc/v1"
)

// Checks answers the center's questions from a ledger: over gRPC with Serve, which needs no setting at the center, or over HTTP
// as a handler of the service's own server (tmc admin set-check TOPIC --kind http --option path=PATH --option batch=true).
type Checks struct {
	tmcv1.UnimplementedCheckServiceServer
	ledger *Ledger
	token  checkToken
}

// Checks returns what answers checks from this ledger. Answers are given to callers with the app's check token only.
func (l *Ledger) Checks() *Checks {
	return &Checks{ledger: l, token: checkToken{client: l.client}}
}

const (
	mostConnections = 256
	announceEvery   = 10 * time.Minute
	repeatEvery     = 5 * time.Second
	stopWithin      = 3 * time.Second
)

// Serve answers checks over gRPC until ctx ends, and tells the center so.
func (c *Checks) Serve(ctx context.Context, listener net.Listener, options ...grpc.ServerOption) error {
	before := func(ctx context.Context, call *tap.Info) (context.Context, error) { // before a body is read; it must not block
		shown := first(call.Header.Get("tmc-check-token"))
		if asks := c.token.mayBeNew(shown); asks {
			go c.token.ask()
			return ctx, errAsking
		}
		return ctx, c.token.verdict(shown)
	}
	server := grpc.NewServer(append([]grpc.ServerOption{
		grpc.InTapHandle(before), grpc.ConnectionTimeout(5 * time.Second), // strangers who are silent
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 5 * time.Minute}),
	}, options...)...)
	tmcv1.RegisterCheckServiceServer(server, c)
	serving, end := context.WithCancel(ctx)
	defer end()
	go func() {
		for {
			pause := announceEvery
			if !c.token.ask() { // the call says where we are
				pause = repeatEvery
			}
			if !sleep(serving, pause) {
				return
			}
		}
	}()
	stop := context.AfterFunc(ctx, func() {
		late := time.AfterFunc(stopWithin, server.Stop)
		defer late.Stop()
		server.GracefulStop()
	})
	defer stop()
	err := server.Serve(netutil.LimitListener(listener, mostConnections))
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// Check answers one question, in a gRPC server of yours: tmcv1.RegisterCheckServiceServer(server, checks).
func (c *Checks) Check(ctx context.Context, question *tmcv1.CheckRequest) (*tmcv1.CheckResponse, error) {
	answers, err := c.CheckMany(ctx, &tmcv1.CheckManyRequest{Items: []*tmcv1.CheckRequest{question}})
	if err != nil {
		return nil, err
	}
	return answers.Results[0], nil
}

// CheckMany answers several.
func (c *Checks) CheckMany(ctx context.Context, questions *tmcv1.CheckManyRequest) (*tmcv1.CheckManyResponse, error) {
	said, _ := metadata.FromIncomingContext(ctx)
	if err := c.allow(first(said.Get("tmc-check-token"))); err != nil {
		return nil, err
	}
	return &tmcv1.CheckManyResponse{Results: c.ledger.answerAll(ctx, questions.Items, true)}, nil
}

// ServeHTTP answers a GET about one message, which must not fence, and a POST about many.
func (c *Checks) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := c.allow(r.Header.Get("Tmc-Check-Token")); err != nil {
		code := http.StatusForbidden
		if status.Code(err) == codes.Unavailable {
			code = http.StatusServiceUnavailable
		}
		http.Error(w, status.Convert(err).Message(), code)
		return
	}
	if r.Method == http.MethodGet {
		question, err := questionOf(itemForm{
			MessageID: r.Header.Get("Tmc-Message-Id"), Topic: r.Header.Get("Tmc-Topic"), Key: r.URL.Query().Get("messageKey"),
			Attempt: r.Header.Get("Tmc-Attempt-Id"), Ledger: r.Header.Get("Tmc-Ledger-Id"),
		}, r.Header.Get("Tmc-Created-Ms"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		writeJSON(w, formOf(c.ledger.answer(r.Context(), question, false)))
		return
	}
	asked := struct{ Items []itemForm }{}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<20)).Decode(&asked); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	questions := make([]*tmcv1.CheckRequest, len(asked.Items))
	for i, item := range asked.Items {
		question, err := questionOf(item, item.Created.String())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		questions[i] = question
	}
	answers := c.ledger.answerAll(r.Context(), questions, true)
	forms := make([]answerForm, len(answers))
	for i, answer := range answers {
		forms[i] = formOf(answer)
	}
	writeJSON(w, map[string]any{"results": forms})
}

type itemForm struct {
	MessageID string      `json:"messageId"`
	Topic     string      `json:"topic"`
	Key       string      `json:"messageKey"`
	Attempt   string      `json:"attemptId"`
	Ledger    string      `json:"ledgerId"`
	Created   json.Number `json:"createdMs"`
}

func questionOf(item itemForm, created string) (*tmcv1.CheckRequest, error) {
	attempt, noAttempt := hex.DecodeString(item.Attempt)
	ledger, noLedger := hex.DecodeString(item.Ledger)
	createdMs, noTime := strconv.ParseInt(created, 10, 64)
	question := &tmcv1.CheckRequest{
		MessageId: item.MessageID, Topic: item.Topic, Key: item.Key, AttemptId: attempt, LedgerId: ledger, CreatedMs: createdMs,
	}
	return question, errors.Join(noAttempt, noLedger, noTime)
}

type answerForm struct {
	MessageID string `json:"messageId"`
	Status    string `json:"status"`
	Detail    string `json:"detail"`
	Because   string `json:"unknownReason,omitempty"`
}

func formOf(answer *tmcv1.CheckResponse) answerForm {
	form := answerForm{MessageID: answer.MessageId, Status: answer.Verdict.String()[len("VERDICT_"):], Detail: answer.Detail}
	if answer.UnknownReason != tmcv1.UnknownReason_UNKNOWN_REASON_UNSPECIFIED {
		form.Because = answer.UnknownReason.String()[len("UNKNOWN_REASON_"):]
	}
	return form
}

func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // who does not read it, asks again
}

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

var errAsking = status.Error(codes.Unavailable, "The center is asked for its check token: try again.")

// allow returns what a caller without our token gets. It asks the center for a token that it does not know.
func (c *Checks) allow(shown string) error {
	if c.token.mayBeNew(shown) {
		c.token.ask()
	}
	return c.token.verdict(shown)
}

// checkToken is what only the center and this app know. A token that it does not know makes it ask the center, but seldom,
// so that strangers cannot keep it busy. The one before is taken for another minute: servers learn of a rotation one by one.
type checkToken struct {
	client *Client

	lock           sync.Mutex
	now, previous  string
	asked, rotated time.Time
}

// mayBeNew returns whether the caller is to ask the center, before the verdict.
func (t *checkToken) mayBeNew(shown string) bool {
	t.lock.Lock()
	defer t.lock.Unlock()
	pause := time.Second
	if t.now != "" {
		pause = repeatEvery
	}
	if t.matches(shown) || time.Since(t.asked) < pause {
		return false
	}
	t.asked = time.Now()
	return true
}

func (t *checkToken) verdict(shown string) error {
	t.lock.Lock()
	defer t.lock.Unlock()
	switch {
	case t.matches(shown):
		return nil
	case t.now == "":
		return errAsking
	}
	return status.Error(codes.PermissionDenied, "This is not the check token of the app.")
}

// ask gets the token from the center, by a call that says where this service answers checks. Returns: it was answered.
func (t *checkToken) ask() bool {
	ctx, cancel := context.WithTimeout(t.client.calling(t.client.ctx), 2*time.Second)
	defer cancel()
	found, err := t.client.messages.DescribeChecks(ctx, &tmcv1.DescribeChecksRequest{})
	if err != nil {
		t.client.log.Warn("tmc: the center does not tell the check token now", "error", err)
		return false
	}
	t.lock.Lock()
	defer t.lock.Unlock()
	if t.asked = time.Now(); found.CheckToken != t.now {
		t.previous, t.now, t.rotated = t.now, found.CheckToken, time.Now()
	}
	return true
}

func (t *checkToken) matches(shown string) bool {
	return same(shown, t.now) || same(shown, t.previous) && time.Since(t.rotated) < time.Minute
}

func same(shown, right string) bool {
	return right != "" && subtle.ConstantTimeCompare([]byte(shown), []byte(right)) == 1
}

const clocksApart = time.Hour // messages are dated by the center's clock, cleaning by ours

func (l *Ledger) answerAll(ctx context.Context, questions []*tmcv1.CheckRequest, fences bool) []*tmcv1.CheckResponse {
	ctx, cancel := context.WithTimeout(ctx, decideWithin) // the center waits for three seconds by default
	defer cancel()
	answers := make([]*tmcv1.CheckResponse, len(questions))
	for i, question := range questions {
		answers[i] = l.answer(ctx, question, fences)
	}
	return answers
}

// answer says what became of a transaction. fences: see to it that "rolled back" stays true.
func (l *Ledger) answer(ctx context.Context, question *tmcv1.CheckRequest, fences bool) *tmcv1.CheckResponse {
	answer := func(verdict tmcv1.Verdict, because tmcv1.UnknownReason, detail string) *tmcv1.CheckResponse {
		return &tmcv1.CheckResponse{MessageId: question.MessageId, Verdict: verdict, UnknownReason: because, Detail: shortened(detail)}
	}
	unknown := func(because tmcv1.UnknownReason, detail string) *tmcv1.CheckResponse {
		return answer(tmcv1.Verdict_VERDICT_UNKNOWN, because, detail)
	}
	verdict := func(state int) *tmcv1.CheckResponse {
		switch state {
		case committed:
			return answer(tmcv1.Verdict_VERDICT_COMMIT, 0, "LEDGER")
		case rolledBack:
			return answer(tmcv1.Verdict_VERDICT_ROLLBACK, 0, "LEDGER")
		}
		return unknown(0, fmt.Sprintf("the ledger row has the state %d, which nobody knows", state))
	}
	if string(question.LedgerId) != string(l.id) {
		return unknown(tmcv1.UnknownReason_UNKNOWN_REASON_WRONG_LEDGER, "WRONG_LEDGER: it was prepared with another one, or with none.")
	}
	state, err := l.state(ctx, question.MessageId)
	switch {
	case err == nil:
		return verdict(state)
	case !errors.Is(err, sql.ErrNoRows):
		return unknown(tmcv1.UnknownReason_UNKNOWN_REASON_NOT_NOW, "LEDGER_AWAY: "+err.Error())
	}
	horizonMs := int64(0)
	if err := l.db.QueryRowContext(ctx, "SELECT horizon_ms FROM tmc_ledger_info").Scan(&horizonMs); err != nil {
		return unknown(tmcv1.UnknownReason_UNKNOWN_REASON_NOT_NOW, "LEDGER_AWAY: "+err.Error())
	}
	if horizonMs != 0 && horizonMs > question.CreatedMs-clocksApart.Milliseconds() {
		return unknown(0, "TOO_OLD: the ledger was cleaned since, so its row may be gone.")
	}
	if !fences {
		return unknown(0, "NOT_THERE: a GET must not fence. Set the target's option batch=true.")
	}
	fenced, err := l.fence(ctx, question)
	if err != nil {
		return unknown(tmcv1.UnknownReason_UNKNOWN_REASON_NOT_NOW, "IN_FLIGHT: "+err.Error())
	}
	if fenced {
		return answer(tmcv1.Verdict_VERDICT_ROLLBACK, 0, "FENCED")
	}
	if state, err = l.state(ctx, question.MessageId); err != nil {
		return unknown(tmcv1.UnknownReason_UNKNOWN_REASON_NOT_NOW, "LEDGER_AWAY: "+err.Error())
	}
	return verdict(state)
}

// state returns the state of a row, or sql.ErrNoRows.
func (l *Ledger) state(ctx context.Context, id string) (state int, err error) {
	query := l.database.sql("SELECT state FROM tmc_ledger WHERE message_id = ?")
	err = l.db.QueryRowContext(ctx, query, id).Scan(&state)
	return state, err
}

// fence inserts a row for a transaction that did not commit: by its key, it cannot any more. Returns false: there is a row.
func (l *Ledger) fence(ctx context.Context, question *tmcv1.CheckRequest) (bool, error) {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer tx.Rollback()
	if err := l.hurry(ctx, tx, question.MessageId); err != nil {
		return false, err
	}
	insert := l.database.insertUnless("tmc_ledger", "message_id, state, topic, message_key, attempt_id, created_ms, settled_ms")
	now := nowMs()
	done, err := tx.ExecContext(ctx, insert,
		question.MessageId, rolledBack, question.Topic, question.Key, question.AttemptId, now, now)
	if err != nil {
		return false, err
	}
	changed, err := done.RowsAffected()
	if err != nil {
		return false, err
	}
	return changed == 1, tx.Commit()
}

// hurry sees to it that a fence does not wait for a transaction that is still open.
func (l *Ledger) hurry(ctx context.Context, tx *sql.Tx, id string) error {
	switch {
	case l.database.shortly == "":
		return nil
	case !l.database.shortlyTakes:
		_, err := tx.ExecContext(ctx, l.database.shortly)
		return err
	}
	state := 0
	err := tx.QueryRowContext(ctx, l.database.shortly, id).Scan(&state)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return err
}
